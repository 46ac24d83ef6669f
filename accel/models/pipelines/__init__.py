"""Pipelines: transformers' pipelines on accel's models, and the pipelines that transformers 5 removed."""
