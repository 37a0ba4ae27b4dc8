"""One image: from a file to the pixels that a network gets."""
