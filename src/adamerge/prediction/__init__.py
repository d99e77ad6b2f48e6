"""Predictions and features of a model for large sets of images, written as sharded parquet files."""
