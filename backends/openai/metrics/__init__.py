"""What upstreams tell of themselves at `/metrics`, whoever made them."""
