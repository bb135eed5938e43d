"""What every command needs: errors a user can act on, tables and numbers, work that can be interrupted."""
