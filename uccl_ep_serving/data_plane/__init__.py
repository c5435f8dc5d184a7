"""One epoch of a rank's window, the routes to its peers and its proxies: how they are built, watched and closed."""
