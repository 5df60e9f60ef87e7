-- Global, allow-listed: the nodes that run now, by the clock of Postgres. Nothing of tenants.
create table nodes (
  boot_id  uuid        constraint nodes_pkey primary key,
  addr     text,
  seen_at  timestamptz not null
);
grant select, insert, update, delete on nodes to throughline_service;
