"""Repair: trains small changes of a merged model's parameters so that it answers like the unmerged model."""
