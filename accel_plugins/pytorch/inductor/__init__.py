"""PyTorch's compiler over transformers models: sizes to compile for, compiling, precision, what checks and times it."""
