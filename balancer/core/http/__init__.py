"""What bodies, headers and streams say, and the little that is changed in them."""
