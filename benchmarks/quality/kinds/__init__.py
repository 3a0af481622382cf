"""Problems of one kind each: their data, their networks and the functions that build them."""
