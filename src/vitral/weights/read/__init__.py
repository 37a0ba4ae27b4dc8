"""Read files and folders of weights into tensors by name, without running any code they hold."""
