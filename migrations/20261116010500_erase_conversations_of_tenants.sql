-- A deleted tenant's conversations go with it. Messages in batches, because there are many; sessions by
-- the cascade from their conversation, because the links of a chain can only go together.
select install_definer_erase(t)
  from unnest(array['messages', 'sessions', 'conversation_grants', 'slot_conversations', 'conversations',
                    'slot_names', 'slots', 'spent_session_ids', 'retention_sweeps']::regclass[]) as t;

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
  foreach target in array array['idempotency', 'api_keys', 'usage_hourly', 'issuers', 'agents',
                                'messages', 'conversation_grants', 'slot_conversations', 'conversations',
                                'slot_names', 'slots', 'spent_session_ids', 'retention_sweeps',
                                'identities', 'users', 'audit', 'audit_heads'] loop
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
