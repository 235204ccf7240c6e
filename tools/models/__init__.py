"""Every model type of Hugging Face transformers that is built offline, with remat and without."""
