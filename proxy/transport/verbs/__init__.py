"""libibverbs and libefa: where their structs lie, their numbers and functions, and their objects."""
