"""What every room may use: errors, files, digests, trees."""
