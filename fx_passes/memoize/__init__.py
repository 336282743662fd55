"""What depends on sizes or masks alone is computed once for each."""
