"""Other libraries' signatures, for a migration by changing one import."""
