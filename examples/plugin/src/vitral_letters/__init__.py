"""Extensions of vitral: see pyproject.toml."""
