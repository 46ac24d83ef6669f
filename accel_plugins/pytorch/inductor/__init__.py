"""The backend `inductor`: runs transformers models through PyTorch's compiler (`torch.compile`)."""
