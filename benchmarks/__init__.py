"""Speed, as ratios between things run side by side in one process. `make bench` prints them."""
