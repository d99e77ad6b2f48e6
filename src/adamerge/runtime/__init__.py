"""Carries out plans; knows no method and no model."""
