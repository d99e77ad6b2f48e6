"""Fine-tuning: trains a model on labelled images while it merges."""
