"""Finds recipes of a given cost: by a search, by a schedule of merges, or by the knob of a method."""
