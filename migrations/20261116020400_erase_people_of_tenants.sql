-- A deleted tenant's links, codes and deliveries go with it.
select install_definer_erase(t)
  from unnest(array['user_redirects', 'identity_moves', 'identity_presence', 'home_channels', 'codes',
                    'code_attempts', 'deliveries', 'chats']::regclass[]) as t;

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
                                'deliveries', 'chats', 'codes', 'code_attempts', 'home_channels',
                                'identity_presence', 'identity_moves', 'user_redirects',
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
