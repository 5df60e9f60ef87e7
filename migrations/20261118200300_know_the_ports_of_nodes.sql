-- Where each node listens, so that no node dials another one for a tenant. A node of an older version writes none of
-- these, and is known by `addr` alone.
--
--   addresses       of the machine's interfaces, but for loopback
--   ports           the node's listeners: never dialled at an address of a node
--   internal_ports  where nodes talk to each other: never dialled anywhere
alter table nodes
  add column addresses text[],
  add column ports integer[],
  add column internal_ports integer[];
