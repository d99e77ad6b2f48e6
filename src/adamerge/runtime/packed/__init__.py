"""Tokens of a batch in one array without padding, in plain torch."""
