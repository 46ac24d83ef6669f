"""The backend `aotinductor`: PyTorch's compiler compiles a model once into a package, which opens without compilation."""
