"""Convert tensors between libraries and sizes: key maps, resizing, inferred configurations."""
