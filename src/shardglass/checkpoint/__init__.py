"""Checkpoints: what a run keeps on disk, and how it gets it back."""
