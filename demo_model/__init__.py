"""A small Ideogram 4 that is trained from nothing in minutes: it draws posters of shapes and short words."""
