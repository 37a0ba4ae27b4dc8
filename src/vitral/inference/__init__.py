"""Inference: the predictor, engines, int8, token merging, test-time augmentation."""
