"""What was made of a model, for people: explanations, debug folders, drawings."""
