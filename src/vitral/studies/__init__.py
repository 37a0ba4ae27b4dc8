"""Studies: questions that take several networks to answer."""
