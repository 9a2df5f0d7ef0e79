"""What knows transformers: loading, data, the Trainer, the training command."""
