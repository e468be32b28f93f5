"""One table trained by several processes of torch.distributed: who they are, what they exchange, their files."""
