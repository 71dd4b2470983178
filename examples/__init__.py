"""Programs that use jaxserve as a trainer does; each is one file, to be read and changed."""
