-- The tables that a deleted tenant's rows are erased from, and in which order: children before parents. The function
-- that erases reads them here, so that a migration with a new table needs one line:
--
--   select install_tenant_erase('new_table', 'users');   -- erased before the rows of users
--
-- A table whose rows go with a parent's by a cascade is not listed: the links of a chain can only go together.
create table tenant_erasure_order (
  position    integer not null,
  table_name  text    not null,
  constraint tenant_erasure_order_pkey primary key (table_name),
  -- Deferrable: positions move up together when a table is put before others.
  constraint tenant_erasure_order_once unique (position) deferrable initially immediate
);
grant select on tenant_erasure_order to throughline_definer;

insert into tenant_erasure_order (table_name, position)
select t.table_name, t.position
  from unnest(array['idempotency', 'api_keys', 'usage_hourly', 'issuers', 'agents',
                    'events', 'turns', 'inbound_receipts', 'pending_links',
                    'messages', 'conversation_grants', 'slot_conversations', 'conversations',
                    'deliveries', 'chats', 'codes', 'code_attempts', 'home_channels',
                    'identity_presence', 'identity_moves', 'user_redirects', 'erased_people',
                    'slot_names', 'slots', 'spent_session_ids', 'retention_sweeps',
                    'identities', 'users', 'audit', 'audit_heads'])
       with ordinality as t (table_name, position);

-- Lets the erasing function delete from a table, and has it do so before it turns to `before`.
create function install_tenant_erase(target regclass, before regclass) returns void
language plpgsql
set search_path = pg_catalog, public
as $$
declare
  place integer := (select position from tenant_erasure_order where table_name = before::text);
begin
  if place is null then
    raise exception 'the table % is not erased with its tenant', before;
  end if;
  perform install_definer_erase(target);
  update tenant_erasure_order set position = position + 1 where position >= place;
  insert into tenant_erasure_order (table_name, position) values (target::text, place);
end
$$;
revoke execute on function install_tenant_erase(regclass, regclass) from public;

create or replace function erase_tenant(p_tenant_id uuid, p_limit integer) returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, public
as $$
declare
  target  text;
  erased  integer;
begin
  if not exists (select 1 from tenants where id = p_tenant_id and state = 'deleting') then
    return 0;
  end if;
  for target in select o.table_name from tenant_erasure_order o order by o.position loop
    execute format(
      'delete from %1$I where tenant_id = $1 and ctid = any (array(
         select ctid from %1$I where tenant_id = $1 limit $2))', target)
      using p_tenant_id, p_limit;
    get diagnostics erased = row_count;
    if erased > 0 then
      return erased;
    end if;
  end loop;
  delete from jobs where tenant_id = p_tenant_id;
  delete from tenants where id = p_tenant_id;
  return 0;
end
$$;
