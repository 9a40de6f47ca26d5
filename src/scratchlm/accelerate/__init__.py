"""Everything that makes the same model faster."""
