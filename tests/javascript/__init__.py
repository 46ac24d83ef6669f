"""Folders of `accel convert --layout transformers.js`, run by npm's `@huggingface/transformers` in Node and in headless Chromium."""
