"""Put merging into a model and take it out again."""
