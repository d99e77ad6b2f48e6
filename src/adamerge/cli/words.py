"""What options mean, in words that several commands share."""

MODEL = "A timm model name, 'embedded', transformers:FOLDER or torchvision:NAME."
PRETRAINED = "Download the library's own weights."
