"""Inference: the predictor, engines, int8, test-time augmentation."""
