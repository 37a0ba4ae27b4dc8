"""Weights: vitral's own file (`native`), published formats (`load`, `formats`), and export to them (`convert`)."""
