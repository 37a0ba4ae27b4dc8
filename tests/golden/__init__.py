"""Golden copies of everything that a user sees: `files/`, the program that makes them, and the test that holds them."""
