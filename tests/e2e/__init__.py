"""A package, so that what its fixtures started ends with its last test."""
