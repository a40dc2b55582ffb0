"""An attack on our first promise: networks drawn to break it, against thousands of digits."""
