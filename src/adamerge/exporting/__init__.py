"""Export of merged models to files that other engines run: ONNX, OpenVINO, torch.export and AOTInductor."""
