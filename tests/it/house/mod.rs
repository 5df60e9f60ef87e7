//! The project itself: its imports, its OpenAPI document and its migrations.

mod architecture;
mod migrations;
mod openapi;
