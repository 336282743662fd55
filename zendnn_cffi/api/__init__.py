"""What users call: optimize, explain, profile, what is installed and what is kept."""
