"""Pipelines: transformers' own over our models, and those that transformers 5 removed."""
