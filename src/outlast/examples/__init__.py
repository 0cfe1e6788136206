"""Examples that run: each beside its plain-PyTorch twin."""
