"""Tables of predictions and features, a row an image."""
