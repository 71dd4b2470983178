"""Device meshes and the rules that place parameters and caches on them."""
