"""Facts about engines, and the checks that judge them. Pure."""
