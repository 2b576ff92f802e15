"""Learning: the warm start, GRPO with counterfactual credit, and the run around them."""
