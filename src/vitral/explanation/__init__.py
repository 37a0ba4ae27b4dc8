"""Looking inside: what a network computes on the way (`capture`), Figure 7 of the paper (`figure7`), maps of what an
answer rests on (`methods`), and whether such a map can be believed (`faithfulness`)."""
